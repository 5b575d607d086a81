"""Train many adapters (tenants) on one frozen, sharded base: added, trained, saved and removed while the job runs.

In: a parallelized model without adapters, a LoraConfig a tenant, batches and whose rows they are. Out: an adapter
folder a tenant. Nothing else in the engine imports this folder but `lora_parallel/__init__.py`, which imports
`TenantPool` when it is asked for.
"""
