"""What an annotation and a class declare."""
