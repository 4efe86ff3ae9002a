"""Methods side by side: tuned on validation data, then tested over several seeds."""
