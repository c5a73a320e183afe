"""What a short run on a user's text teaches about a model's experts."""
