"""Figures of the local memory: knn-per.txt, Figures 1, 2, 5, 7, 8 and 9."""
