"""The commands of ``knnper figure``: figures of the papers."""
