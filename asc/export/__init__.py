"""Encoders for other people's programs: timm and Hugging Face's hub, ONNX."""
