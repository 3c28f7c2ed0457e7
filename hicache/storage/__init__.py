"""The external tier: where pages outlive the host's memory. Bytes and names; no decision is taken here."""
