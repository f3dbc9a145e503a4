"""The trainer of these tests: runs the script that its room has for this attempt and rank."""

import json
import sys
from pathlib import Path


def main() -> None:
    start = json.loads(sys.argv[2])
    script = Path(sys.argv[1]).parent / f"trainer-{start['attempt']}-{start['rank']}.py"
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
