"""Protocol files played one after the other, and the one report on all of them."""
