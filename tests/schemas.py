"""What every request that is made from an OpenAPI document must satisfy."""

import schemathesis

CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
    schemathesis.checks.unsupported_method,
]
