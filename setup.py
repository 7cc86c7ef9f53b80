"""What setup.cfg cannot say: the library that ranks under a CPU quota preload. Without a C compiler it is left out."""

from setuptools import Extension, setup

setup(
    ext_modules=[Extension("hvd_adaptive.cluster.patient_yield", ["hvd_adaptive/cluster/patient_yield.c"], optional=True)]
)
