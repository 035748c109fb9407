"""The tasks: one table. A new one is written in a module of this folder and named here."""

from ..task import Task
from .images import Digits, Fashion
from .tabular import Admissions, Diabetes

TASKS: dict[str, type[Task]] = {task.name: task for task in (Admissions, Digits, Diabetes, Fashion)}
"""All tasks, in the order in which they are shown."""
