"""Data sets in the format of the Hugging Face Hub, in a folder: data files, and a README.md that names them."""

import json

README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
- config_name: hard
  data_files:
  - split: validation
    path: hard/validation.{kind}
---
Sums.
"""


def question(split, index):
    return {"question": f"the {split} film number {index} is", "answer": index, "level": index % 2}


def write_hub_folder(folder, *, readme=README, kind="jsonl", rows=12):
    """Two configurations of sums: ``main`` with two splits, ``hard`` with one; files are ``jsonl`` or ``parquet``."""
    import datasets

    for name, split, count in (("main", "train", rows), ("main", "test", rows), ("hard", "validation", 3)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        path = folder / name / f"{split}.{kind}"
        questions = [question(split, index) for index in range(count)]
        if kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in questions))
        else:
            datasets.Dataset.from_list(questions).to_parquet(str(path))
    if readme:
        (folder / "README.md").write_text(readme.replace("jsonl", kind).replace("{kind}", kind))
    return folder
