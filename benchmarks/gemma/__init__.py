"""Fine-tune a real model, Gemma 3 270M, on four processes and on one, and compare what comes out."""
