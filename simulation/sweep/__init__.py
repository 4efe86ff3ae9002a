"""One experiment, or several methods, at many settings and several seeds."""
