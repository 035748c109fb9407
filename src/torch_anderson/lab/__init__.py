"""The laboratory: the paper's experiments and more as one command, with controls, figures and a page to read.

It uses nothing of the library but its public names. Needs the extra ``lab``.
"""
