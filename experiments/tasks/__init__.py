"""The tasks: one table. A new one is written in a module of this folder and named here."""

from ..task import Task
from .burgers import Burgers2d, Burgers2dFixed, Burgers100d, BurgersNd
from .images import Digits, Fashion
from .residual_images import Cifar10, FashionResNet
from .tabular import Admissions, Diabetes

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        *(Admissions, Burgers2d, Burgers100d, Burgers2dFixed, BurgersNd, Digits, Diabetes, Fashion),
        *(Cifar10, FashionResNet),
    )
}
"""All tasks, in the order in which they are shown."""
