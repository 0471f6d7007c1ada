"""Examples to learn from: records of many forms → tokens and which of them are learned → samples of whole examples."""
