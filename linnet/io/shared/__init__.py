"""What checkpoints, weights files and exports share.

- ``entries``: the type and the path of an entry, and plain values as JSON;
- ``objects``: live objects as flat maps from path to leaf, and values written back into them;
- ``matching``: stored entries compared with wanted ones, and the list of what does not fit;
- ``placing``: a value with the dtype, on the device and with the sharding that an entry has;
- ``files``: untrusted files opened with checks, and files written durably;
- ``processes``: what one process does for all, and what is the same in all of them;
- ``folders``: where checkpoints live: free space, locks, renames, leftovers.
"""
