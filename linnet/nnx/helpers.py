"""The older home of the containers."""

from linnet.nnx.containers import Dict as Dict
from linnet.nnx.containers import List as List
from linnet.nnx.sequential import Sequential as Sequential
