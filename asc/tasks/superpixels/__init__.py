"""How good superpixels are: against human segmentations and object masks, beside other superpixels of equal number."""
