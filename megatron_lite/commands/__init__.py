"""Commands that neither train nor generate: one file each."""
