"""What a model writes and reads back: checkpoints, exports, and going on from them."""
