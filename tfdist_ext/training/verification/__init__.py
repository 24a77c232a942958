"""`tfd.verify`: proves that a model trains the same on one device and on a strategy."""
