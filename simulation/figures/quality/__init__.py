"""The figure of the global model's quality: knn-per.txt, Figures 3, 12 and 13."""
