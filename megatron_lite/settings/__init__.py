"""The definition of every flag, and checks that the flags fit each other."""
