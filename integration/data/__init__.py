"""Text and tasks to train and evaluate on."""
