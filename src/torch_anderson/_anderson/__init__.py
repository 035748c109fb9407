"""Anderson acceleration, driven by residuals: the public class (``door``), the algorithms, and their parts."""
