"""What is measured and against what: timing, plain implementations of our own, the rows of the speed table."""
