"""Problems of regression on real data, and the table of all problems."""

from .problems import EQUATIONS, Problem

SURROGATES: tuple[Problem, ...] = ()
PROBLEMS = {problem.name: problem for problem in (*EQUATIONS, *SURROGATES)}
