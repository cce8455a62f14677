"""Arrays by name, and files of them."""
