"""What `knnper doctor` looks at on every machine, and how it says what it found."""
