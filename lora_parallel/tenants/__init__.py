"""Many adapters (tenants) on one frozen, sharded base: added, trained, saved and removed while the job runs."""

from lora_parallel.tenants.pool import TenantPool

__all__ = ["TenantPool"]
