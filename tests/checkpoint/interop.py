"""Files of the reference safetensors library load here, and ours load there. Usage: interop.py PROGRAM (see interop.cpp)"""
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

program = sys.argv[1]


def counted(dtype, *shape):
    return np.arange(int(np.prod(shape, dtype=np.int64)), dtype=dtype).reshape(shape)


tensors = {
    "whole": counted(np.float32, 5, 3),
    'name with "quotes" and ü': counted(np.float64, 7),
    "scalar": counted(np.int64),
    "empty": counted(np.float32, 0, 4),
    "bytes": counted(np.uint8, 3, 1),
    "cut": counted(np.float32, 6, 4),
}


def expect(condition, what):
    if not condition:
        sys.exit(f"interop: {what}")


def same(loaded, names):
    expect(set(loaded) == set(names), f"names {sorted(loaded)}, expected {sorted(names)}")
    for name in names:
        a, b = loaded[name], tensors[name]
        expect(a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b), f"{name} differs")


with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)

    # Ours, read there: by the index, file by file, and merged into one.
    subprocess.run([program, "write", str(folder / "ours")], check=True)
    step = folder / "ours" / "step-00000007"
    index = json.loads((step / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(step / file, framework="numpy") as f:
            found[name] = f.get_tensor(name)
    same(found, [name for name in tensors if name != "cut"])
    pieces = {}
    for file in sorted(step.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as f:
            said = json.loads(f.metadata()["dtensor.pieces"])
            for name in f.keys():
                if name in said:
                    pieces[said[name]["box"]] = f.get_tensor(name)
    expect(sorted(pieces) == ["0:6/6,0:2/4", "0:6/6,2:4/4"], f"boxes {sorted(pieces)}")
    joined = np.concatenate([pieces[box] for box in sorted(pieces)], axis=1)
    expect(np.array_equal(joined, tensors["cut"]), "the pieces together differ")
    same(load_file(folder / "ours" / "merged.safetensors"), tensors)

    # Theirs, read here: one file, and several with an index.
    save_file(tensors, folder / "one.safetensors", metadata={"format": "np"})
    subprocess.run([program, "read", str(folder / "one.safetensors")], check=True)
    theirs = folder / "theirs"
    theirs.mkdir()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:3], names[3:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, theirs / file)
        weight_map.update({name: file for name in part})
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    subprocess.run([program, "read", str(theirs)], check=True)
print("interop: fine")
