"""Many runs at a time, each in a folder that is named by what it is."""
