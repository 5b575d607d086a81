"""Stand for torchaudio, which LLaMA-Factory imports always, and uses for audio only."""
