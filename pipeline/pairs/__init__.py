"""Pairs of views on their way to the network: `order` (which pair when), `loader` (read, changed, made ahead)."""
