"""One file per model; `base` is the road they all take."""
