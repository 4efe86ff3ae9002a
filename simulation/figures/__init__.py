"""Figures of knn-per.txt, made with the global model of a finished run."""
