"""What a retrieval method is: no vLLM and no devices in here."""
