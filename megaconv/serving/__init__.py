"""Any checkpoint, shown as a Hugging Face repository: its files are planned, and computed when a client asks for them."""
