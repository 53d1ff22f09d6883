"""Classification of images by the features of an encoder."""
