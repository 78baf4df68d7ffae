"""Pairs of views on their way to the network: `batch` (shapes and units), `order` (which pair when), `loader`."""
