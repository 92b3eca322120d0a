"""Run notebooks and keep what they show: python notebooks/execute.py notebooks/02_attention_and_neurons.ipynb …

Of a view only its picture is kept, not its HTML, which a code host does not show and which is several times as large.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

for name in sys.argv[1:]:
    path = Path(name)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=1800, record_timing=False, resources={"metadata": {"path": path.parent}}).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            # Progress and the like.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "image/svg+xml" in output.get("data", {}):
                    output.data.pop("text/html", None)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, path)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
