"""Where photographs come from: folders, archives read in place, downloads; their manifest; decoding."""
