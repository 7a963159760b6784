"""Builds the native library with AMX emulated: python emulated_amx.py OUT_DIR

The library takes the instruction set amx for available, whose object multiplies in emulated_tiles.h. The processor
must have AVX-512.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(out_dir: Path) -> None:
    spec = spec_from_file_location("linrope_native_build", HERE.parents[2] / "kernels" / "cpu" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = module_from_spec(spec)
    spec.loader.exec_module(build)
    build.ISAS["x86_64"]["amx"] = [*build.V4, "-include", str(HERE / "emulated_tiles.h")]
    build.FLAGS.append("-DLINROPE_EMULATED_TILES")
    print(build.build(out_dir))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
