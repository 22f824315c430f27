"""Watch the files and libraries that this process loads. The fork server imports this module before any other."""

from groupbench.operators.measure.loaded import watch

watch()
