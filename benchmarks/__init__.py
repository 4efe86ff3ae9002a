"""Speed and memory relative to stated baselines; each module is one command."""
