"""ProtoNN: a few learned prototypes in place of all stored examples."""
