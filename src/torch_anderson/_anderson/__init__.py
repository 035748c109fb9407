"""Anderson acceleration: the public class, its two algorithms, and their parts.

door                            ``Anderson``, its options and documentation
residual="gradient", default:   gradients (the algorithm), gradient_memory, secants (where to jump), noise
residual="step", the paper's:   steps (the algorithm), step_memory, trial, safeguard, average
both:                           residual (what is measured), history (rows), gram (their products), storage
"""
