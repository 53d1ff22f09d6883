"""What a pre-trained encoder is judged by, one room for each kind of task."""
