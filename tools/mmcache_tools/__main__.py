"""`python -m mmcache_tools`: the `mmcache` command where no console script is installed.

Owns: nothing. Does not own: the commands (:mod:`mmcache_tools.cli`).
"""

from mmcache_tools.cli import main

if __name__ == "__main__":
    main()
