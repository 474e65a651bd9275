"""SGLang's wire: ``/generate``, its parameters, frames and control endpoints."""
