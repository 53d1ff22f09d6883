"""Self-supervised pre-training on pairs of video frames."""
