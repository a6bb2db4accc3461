"""``python -m vllm_kvretrieval``, as the ``vllm-kvretrieval`` command."""

import sys

from vllm_kvretrieval.command import main

sys.exit(main())
