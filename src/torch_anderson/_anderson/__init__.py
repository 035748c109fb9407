"""Anderson acceleration: the public class, its two algorithms, and their parts.

optimizer                       ``Anderson``, its options and documentation
residual="gradient", default:   gradient (the algorithm and its state), quasi_newton (where to jump), noise
residual="step", the paper's:   step (the algorithm and its state), snapshot, average
both:                           residuals (what is measured), pairs (rows and their products), least_squares, trial (a
                                jump that waits for its decision), storage
"""
